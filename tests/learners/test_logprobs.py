from __future__ import annotations

import pytest
import torch

from asyncrl.learners.logprobs import token_scores


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float):
    logits = hidden @ weight.t()
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy(), logits.argmax(1) == targets


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tile_elements", [1, 64, 300, 1 << 24])  # down to one column, one token at a time
def test_scores_and_gradients_equal_the_full_softmax(temperature: float, tile_elements: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator).requires_grad_()
    weight = torch.randn(37, 8, generator=generator).requires_grad_()
    targets = torch.randint(37, (23,), generator=generator)
    coefficients = torch.randn(23, generator=generator)
    logprobs, entropy, greedy = naive(hidden, weight, targets, temperature)
    expected = torch.autograd.grad((logprobs * coefficients).sum(), (hidden, weight))
    scores = token_scores(hidden, weight, targets, temperature=temperature, tile_elements=tile_elements)
    actual = torch.autograd.grad((scores.logprobs * coefficients).sum(), (hidden, weight))
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.greedy, greedy)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_no_token_gives_zero_gradients() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    scores = token_scores(hidden, weight, torch.zeros(0, dtype=torch.long), temperature=1.0)
    scores.logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() == 0
    assert hidden.grad is not None and hidden.grad.shape == (0, 8)


def test_bfloat16_inputs_are_scored_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(37, 8, generator=generator)
    targets = torch.arange(9)
    half = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    scores = token_scores(half[0], half[1], targets, temperature=1.0)
    assert scores.logprobs.dtype == torch.float32
    torch.testing.assert_close(scores.logprobs, naive(hidden, weight, targets, 1.0)[0], rtol=0, atol=0.1)
    scores.logprobs.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in half)
