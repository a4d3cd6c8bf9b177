"""The report's page: its figures are the Parquet's, its texts are escaped, and a browser draws it from itself alone."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.errors import LimitExceeded
from kvbatch.estimate.quality import SCHEMA as QUALITY_SCHEMA
from kvbatch.job_file.load import load_job
from kvbatch.report.html.page import write_page
from kvbatch.run.entry import run_job
from tests.engine.models.tiny_models import save_tiny_model

NASTY = "<script>alert(1)</script>&\"'"
PLOTS = {"throughput", "kv-bytes", "lengths", "packing", "kept", "quality"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def records():
    rows = [{"id": f"r{n}", "text": f"{n} secret fox " * (3 + n * 7 % 29)} for n in range(30)]
    rows += [
        {"id": NASTY, "text": "secret " * 200},
        {"id": "null", "text": None},
        {"id": "blank", "text": " "},
    ]
    return rows


@pytest.fixture
def run(job_file, tmp_path, tiny_model):
    """A run with a compressed cache, three bins and more, truncated and rejected rows."""
    save_tiny_model(tmp_path / "model", "llama", vocab_size=320, max_position_embeddings=512)
    for file in tiny_model.glob("*token*.j*"):
        shutil.copy(file, tmp_path / "model")
    cache = {"preset": "logs", "tail_tokens": 0, "budget": "uniform"}
    long = {"on_too_long": "truncate"}
    path = job_file(records(), model={"path": "model"}, cache=cache, long_document=long)
    found = run_job(load_job(path)).run
    sample = [
        {"row_id": "r1", "prompt_tokens": 90, "nll_delta": -0.05, "kl": 0.1, "top1_agreement": 1.0},
        {"row_id": "r2", "prompt_tokens": 140, "nll_delta": 0.25, "kl": 0.5, "top1_agreement": 0.5},
        {"row_id": "r3", "error": "out of memory"},
    ]
    pq.write_table(pa.Table.from_pylist(sample, QUALITY_SCHEMA), found.quality)
    write_page(found)
    return found


class Page(HTMLParser):
    """Collect a page's tags, and its texts by the tag that they stand in."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.texts = [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.setdefault(self.tags[-1][0] if self.tags else "", []).append(data)


def test_figures_are_those_of_the_parquet(run):
    page = Page(run.page.read_text())
    figures = json.loads(page.texts["script"][0])
    rows = pl.read_parquet(run.shards / "*.parquet")
    plan = pl.read_parquet(run.path / "plan.parquet")
    steps = pl.read_parquet(run.steps)
    bins = pl.read_parquet(run.path / "stats" / "bins.parquet")

    summary = figures["summary"]
    assert summary["rows"] == len(rows) == 33
    assert summary["ok"] == (rows["kvb_status"] == "ok").sum()
    assert summary["prompt_tokens"] == rows.filter(pl.col("kvb_attempts") > 0)["kvb_prompt_tokens"].sum()
    ratio = rows["kvb_kv_kept_bytes"].sum() / rows["kvb_kv_full_bytes"].sum()
    assert summary["kv_kept_ratio"] == pytest.approx(ratio) and ratio < 1

    lengths, width = figures["lengths"], figures["lengths"]["class_tokens"]
    assert {name: sum(counts) for name, counts in lengths["counts"].items()} == {"fits": 30, "truncated": 1}
    first = plan.filter((pl.col("outcome") == "fits") & (pl.col("prompt_tokens") < width))
    assert lengths["counts"]["fits"][0] == len(first)
    assert sorted(zip(lengths["packed"]["prompt_tokens"], lengths["packed"]["bin"], strict=True)) == sorted(
        plan.drop_nulls("bin").select("prompt_tokens", "bin").iter_rows()
    )
    assert figures["bins"]["rows"] == bins["rows"].to_list() and len(bins) > 2
    assert figures["bins"]["mean_efficiency"] == pytest.approx(bins["packing_efficiency"].mean())

    timeline = figures["timeline"]
    assert max(timeline["kv_used_bytes"]) == steps["kv_used_bytes"].max()
    assert max(timeline["kv_reserved_bytes"]) == steps["kv_reserved_bytes"].max()
    fastest = (steps["num_tokens"] / steps["step_s"]).max()
    assert 0 < max(timeline["tokens_per_s"]) <= fastest * 1.001

    kinds = {kind["error_code"]: kind["row_ids"] for kind in figures["errors"]}
    assert kinds == {"empty_text": ["null", "blank"]}
    seconds = (rows["kvb_prefill_s"] + rows["kvb_decode_s"]).drop_nulls().sort(descending=True)
    assert [row["total_s"] for row in figures["slowest"]] == pytest.approx(seconds[:10].to_list())
    assert [row["row_id"] for row in figures["quality"]["rows"]] == ["r2", "r1"]
    assert figures["quality"]["measures"]["top1_agreement"] == {"mean": 0.75, "worst": 0.5}
    assert figures["quality"]["measures"]["nll_delta"] == {"mean": pytest.approx(0.1), "worst": 0.25}
    for shown in (
        f"{summary['prompt_tokens']:,}",
        f"{ratio:.1%}",
        f"{bins['packing_efficiency'].mean():.1%}",
    ):
        assert any(shown in text for texts in page.texts.values() for text in texts), shown


def test_everything_foreign_is_escaped_and_no_document_is_quoted(run):
    text = run.page.read_text()
    page = Page(text)
    assert "secret" not in text and "alert(1)</script>" not in text
    assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == [
        "application/json"
    ]
    links = [
        value for _, attributes in page.tags for name, value in attributes.items() if name.endswith("href")
    ]
    assert links and all(link.startswith("#") or link == "data:," for link in links)
    assert not any("src" in attributes for _, attributes in page.tags)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_page_that_cannot_be_written_fails_no_run(job_file, monkeypatch, capsys):
    monkeypatch.setattr("kvbatch.report.html.page.write_page", lambda *_: 1 / 0)
    found = run_job(load_job(job_file([{"id": "a", "text": "fox"}]))).run
    assert found.is_success and not found.page.exists()
    assert "report.html was not written, ZeroDivisionError" in capsys.readouterr().err
    assert "ZeroDivisionError" in found.log.read_text()


def test_a_run_without_answers_has_a_page_too(job_file):
    with pytest.raises(LimitExceeded):
        run_job(load_job(job_file([{"id": NASTY, "text": ""}])))
    page = Path("runs/test/latest/report.html")
    assert "No steps were recorded" in page.read_text() and escape(NASTY) in page.read_text()


# --- in a browser

# Run by a copy of the page that does not forbid scripts: what is drawn, in which colours, and what was asked for.
PROBE = """<script>
addEventListener("load", () => {
  const size = (element) => element.getBoundingClientRect().width;
  const plots = [...document.querySelectorAll("svg.plot")].map((svg) => ({
    name: svg.id.slice(5),
    width: size(svg),
    texts: [...svg.querySelectorAll("text")].filter((text) => size(text) > 0).length,
    marks: [...svg.querySelectorAll("path, use")].filter((mark) => size(mark) > 1).length,
    ink: getComputedStyle(svg.querySelector("text")).fill,
  }));
  const fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.title = JSON.stringify({plots, fetched, paper: getComputedStyle(document.body).backgroundColor});
});
</script></body>"""


@pytest.fixture
def look(tmp_path):
    """Open a text as a file in headless Chromium and return what the probe in it saw."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path")

    def open_page(text: str, *flags: str) -> dict:
        path = tmp_path / "probed.html"
        path.write_text(text.replace("</body>", PROBE))
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *flags]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--disable-background-networking"]
        command += ["--proxy-server=127.0.0.1:9", "--dump-dom", path.as_uri()]  # nothing answers there
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1]))

    return open_page


@pytest.mark.slow
def test_a_browser_draws_every_plot_in_light_and_dark_and_fetches_nothing(run, look):
    text = run.page.read_text()
    forbids = re.search(r"<meta http-equiv.*?>", text)[0]
    assert "default-src 'none'" in forbids
    seen = {}
    for mode, scheme in {"light": 1, "dark": 0}.items():
        seen[mode] = look(text.replace(forbids, ""), f"--blink-settings=preferredColorScheme={scheme}")
        assert seen[mode]["fetched"] == []
        assert {plot["name"] for plot in seen[mode]["plots"]} == PLOTS
        for plot in seen[mode]["plots"]:
            assert plot["width"] > 300 and plot["texts"] >= 4 and plot["marks"] >= 3, plot
    assert seen["light"]["paper"] == "rgb(255, 255, 255)" != seen["dark"]["paper"]
    assert seen["light"]["plots"][0]["ink"] != seen["dark"]["plots"][0]["ink"]
    leaky = look("<body><img src='http://example.invalid/seen.png'></body>")
    assert leaky["fetched"] == ["http://example.invalid/seen.png"], "the probe would notice"
