"""Columns of a run's output, and of its dead letters."""

import pyarrow as pa

ANSWER_FIELDS = [
    pa.field("question", pa.string()),
    pa.field("output", pa.string()),
    pa.field("output_json", pa.string()),
    pa.field("status", pa.string()),  # ok | error
    pa.field("finish_reason", pa.string()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
]


PART_FIELDS = [
    pa.field("part", pa.int32()),  # from 0
    pa.field("question", pa.int32()),  # its place in the list of questions; null if there is none
    pa.field("output", pa.string()),
    pa.field("finish_reason", pa.string()),
]


OUTPUT_FIELDS = [
    pa.field("output", pa.string()),
    pa.field("output_json", pa.string()),  # the same, proved to be of generation.json_schema
    pa.field("kvb_status", pa.string()),  # ok | rejected | error
    pa.field("kvb_finish_reason", pa.string()),  # stop | length | repetition | error
    pa.field("kvb_error_code", pa.string()),
    pa.field("kvb_error_message", pa.string()),
    pa.field("kvb_attempts", pa.int32()),
    pa.field("kvb_oom_steps", pa.string()),  # what was tried when memory ran out, see `OomRetry`
    pa.field("kvb_prompt_tokens", pa.int64()),
    pa.field("kvb_completion_tokens", pa.int64()),
    pa.field("kvb_cached_prompt_tokens", pa.int64()),
    pa.field("kvb_outcome", pa.string()),  # what the plan made of the document: fits | truncated | split | …
    pa.field("kvb_n_parts", pa.int32()),
    pa.field("kvb_n_levels", pa.int32()),  # of answers over answers, of a split document
    pa.field("kvb_n_answers", pa.int32()),  # to its questions, of its parts and over these
    pa.field("kvb_n_cut", pa.int32()),  # of them, those that ended by length or repetition
    pa.field("kvb_answers", pa.list_(pa.struct(ANSWER_FIELDS))),  # to several questions, in their order
    pa.field("kvb_parts", pa.list_(pa.struct(PART_FIELDS))),  # what the parts answered, if it is kept
    pa.field("kvb_dropped_tokens", pa.int64()),
    pa.field("kvb_truncation_side", pa.string()),
    pa.field("kvb_removed_chars", pa.int64()),  # by prompt.clean
    pa.field("kvb_n_chunks", pa.int32()),
    pa.field("kvb_kv_full_bytes", pa.int64()),
    pa.field("kvb_kv_kept_bytes", pa.int64()),
    pa.field("kvb_kv_peak_bytes", pa.int64()),
    pa.field("kvb_kv_kept_ratio", pa.float64()),
    pa.field("kvb_prefill_s", pa.float64()),  # the row's own share of compute
    pa.field("kvb_decode_s", pa.float64()),
    pa.field("kvb_wait_s", pa.float64()),  # the time its requests were in the engine less the two before
    pa.field("kvb_input_file", pa.string()),  # path of the file that the row was read from
    pa.field("kvb_shard", pa.int32()),
    pa.field("kvb_bin", pa.int32()),
    pa.field("kvb_seed", pa.int64()),
    pa.field("kvb_run_id", pa.string()),
    pa.field("kvb_config_hash", pa.string()),
]


INPUT_FIELDS = [
    pa.field("kvb_input_row", pa.int64()),
    pa.field("kvb_input_text", pa.string()),
    pa.field("kvb_input_raw", pa.large_binary()),  # a row that could not be read, as it stands in the file
]
