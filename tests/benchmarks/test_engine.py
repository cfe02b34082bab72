"""The benchmark runs, and what it reports is about the same work on both sides."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.engine import bytes_per_decoded_token, main, make_jobs


def test_lengths_are_mixed_and_span_the_ranges():
    jobs = make_jobs(16, vocab_size=100, seed=3, prompt_lens=(4, 20), answer_lens=(2, 31))
    prompts, answers = [len(job.prompt.token_ids) for job in jobs], [job.num_tokens for job in jobs]
    assert (min(prompts), max(prompts), min(answers), max(answers)) == (4, 20, 2, 31)
    assert sorted(prompts) != prompts
    assert len(set(answers)) > 10
    again = make_jobs(16, vocab_size=100, seed=3, prompt_lens=(4, 20), answer_lens=(2, 31))
    assert [job.prompt.token_ids for job in jobs] == [job.prompt.token_ids for job in again]


def test_a_single_job_has_the_longest_lengths():
    [job] = make_jobs(1, vocab_size=100, seed=3, prompt_lens=(4, 20), answer_lens=(2, 31))
    assert (len(job.prompt.token_ids), job.num_tokens) == (20, 31)


@pytest.mark.parametrize("tied", [True, False])
def test_decode_reads_all_weights_except_embeddings(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50,
            tie_word_embeddings=tied,
        )
    )  # fmt: skip
    embedding = 0 if tied else model.get_input_embeddings().weight.nbytes
    assert bytes_per_decoded_token(model) == sum(weight.nbytes for weight in model.parameters()) - embedding


def test_the_report_compares_equal_tokens(tmp_path, capsys):
    path = tmp_path / "results" / "report.json"
    main(["--tiny", "--device", "cpu", "--concurrency", "1", "5", "--repeats", "2", "--prompt-lens", "3-9",
          "--answer-lens", "2-6", "--kv-cache-memory", "8MiB", "--json", str(path)])  # fmt: skip
    report = json.loads(path.read_text())
    assert [row["concurrency"] for row in report["rows"]] == [1, 5]
    assert all(row["same_tokens"] == 1 for row in report["rows"])
    assert all(row["engine_tokens_per_s"] > 0 and row["step_overhead_ms"] > 0 for row in report["rows"])
    assert report["torch"] == torch.__version__
    assert "same" in capsys.readouterr().out
