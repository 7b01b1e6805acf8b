"""The attention that the demo model is trained with gives what torch's own gives under the same mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
ROWS, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 2, 4, 2, 256, 16


def packed_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of samples and positions in them; samples begin within blocks, the second row has an empty rest."""
    samples, positions = torch.full((ROWS, TOKENS), -1), torch.zeros(ROWS, TOKENS, dtype=torch.long)
    for row, lengths in enumerate(((70, 100, 86), (30, 150))):
        begin = 0
        for number, length in enumerate(lengths):
            samples[row, begin : begin + length] = number
            positions[row, begin : begin + length] = torch.arange(length)
            begin += length
    return samples, positions


def test_packed_attention_is_attention_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from packed_attention import packed_attention, packed_mask

    torch.manual_seed(0)
    samples, positions = packed_rows()
    shapes = ((HEADS, TOKENS), (KV_HEADS, TOKENS), (KV_HEADS, TOKENS))
    query, key, value = (torch.randn(ROWS, *shape, HEAD_DIM, requires_grad=True) for shape in shapes)
    seen = (samples[:, None, :, None] == samples[:, None, None, :]).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=0.25, enable_gqa=True)
    got, _ = packed_attention(torch.nn.Module(), query, key, value, packed_mask(samples), 0.25, positions)
    learned = (samples >= 0)[:, :, None, None]  # the rest of a row has no labels
    weights = torch.randn(ROWS, TOKENS, HEADS, HEAD_DIM) * learned
    torch.testing.assert_close(got.float() * learned, expected.transpose(1, 2) * learned, atol=0.02, rtol=0.02)
    wanted = torch.autograd.grad((expected.transpose(1, 2) * weights).sum(), (query, key, value))
    found = torch.autograd.grad((got * weights).sum(), (query, key, value))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)
