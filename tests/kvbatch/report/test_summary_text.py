"""What a summary says to people: the sentence of the page, the two lines on a compressed cache, the memory."""

from kvbatch.report.headline import commands, duration, headline
from kvbatch.report.summary import Counts
from kvbatch.report.summary_text import memory_text, render

MIB = 1 << 20


def summary(**changed):
    counts = {name: 0 if kind is int else {} for name, kind in Counts.__annotations__.items()}
    found = {
        "job": "j",
        "run_id": "r",
        "run": "runs/j/r",
        "status": "complete",
        "planned_rows": 10,
        "left_out": 0,
    }
    found |= {"skipped": [], "advice": None, "next_command": None, "quality": None, "page": None}
    found |= {"output": "runs/j/r/shards", "tokens_per_s": 512.4, "generated_tokens_per_s": 12.0}
    found |= {
        "kv_kept_ratio": None,
        "kv_kept_tokens_ratio": None,
        "kv_bits_per_element": None,
        "kv_layers": [],
    }
    return counts | found | changed


def test_the_headline_says_what_came_of_a_run_and_what_to_do():
    done = summary(ok=10, rows=10, answers=10, ended=10, carried=3, wall_s=7801.0)
    assert headline(done) == (
        "All 10 rows were answered (3 carried over from earlier runs), none failed and none of 10 answers were cut "
        "short, in 2 h 10 min; nothing is left to do."
    )
    assert commands(done) == []
    cut = "at 8 tokens: kvbatch retry runs/j/r --status length --max-new-tokens 32"
    bad = summary(ok=7, rows=10, errors=2, rejected=1, answers=7, ended=6, cut=1, advice=cut, wall_s=4.2)
    assert headline(bad) == (
        "7 of 10 rows were answered, 3 failed and 1 of 7 answers was cut short, in 4.2 s; to do: look at the errors "
        "and retry these rows, correct the rejected rows of the input and run the cut answers again."
    )
    assert [line for line in commands(bad) if "--status error" in line] and cut in commands(bad)[-1]
    stopped = summary(ok=1, rows=1, answers=1, ended=1, next_command="kvbatch resume runs/j/r")
    assert headline(stopped).endswith("; to do: continue the run.") and "resume" in commands(stopped)[0]
    assert headline(summary(planned_rows=0)) == "The input has no rows; nothing is left to do."
    assert [duration(s) for s in (9.96, 59, 61, 3600)] == ["10.0 s", "59 s", "1 min 1 s", "1 h 0 min"]


def test_two_lines_say_what_a_compressed_cache_saved_and_cost():
    quality = {"num_rows": 4, "num_failed": 0, "nll_delta": 0.004, "kl": 0.01, "top1_agreement": 0.98}
    layer = {"layer": 0} | {
        f"{name}_{part}": 0.5
        for name in ("kept_ratio", "bits_per_element")
        for part in ("min", "median", "max")
    }
    figures = {"kv_kept_bytes": 61 * MIB, "kv_full_bytes": 254 * MIB, "kv_kept_ratio": 61 / 254}
    compressed = summary(ok=10, rows=10, **figures, kv_layers=[layer], quality=quality)
    lines = render(compressed).splitlines()
    assert lines[2] == "cache        kept 24.0% of the full cache's bytes (61.0 MiB of 254.0 MiB)"
    assert lines[3].strip() == "costs +0.0040 nats a token on 4 sampled rows (top-1 98.0%); 512 tokens/s"
    assert "loss not measured: quality_guard" in render(compressed | {"quality": None})
    assert "full cache's" not in render(compressed | {"kv_layers": []}), "a guard fell back on the full cache"


def test_memory_is_that_of_the_whole_process():
    measured = {
        "process_peak_bytes": 612 * MIB,
        "process_predicted_bytes": 640 * MIB,
        "weight_bytes": 269 * MIB,
    }
    pools = {"kv_pool_bytes": 120 * MIB, "kv_allocated_bytes": 200 * MIB}
    assert memory_text(summary(**measured, **pools, device="cpu")) == (
        "612.0 MiB of process (predicted 640.0 MiB): weights 269.0 MiB, pool 120.0 MiB, buffers 80.0 MiB, "
        "rest 143.0 MiB"
    )
    on_gpu = memory_text(summary(**measured, **pools, device="cuda"))
    assert "on cuda: weights" in on_gpu and "rest" not in on_gpu
    assert memory_text(summary()) == ""
