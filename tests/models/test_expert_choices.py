from __future__ import annotations

import torch

from vlmserve.models.expert_choices import ExpertChoices


def scores(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_a_pass_in_pieces_chooses_the_same_experts() -> None:
    choices = ExpertChoices()
    first, second = torch.rand(5, 8), torch.rand(3, 8)
    with choices.record():
        expected_first = torch.topk(first, 2).indices
    with choices.record():
        expected_second = second.topk(2, dim=-1, sorted=False)[1]
    other = torch.rand(4, 8)
    with choices.replay([(1, 4), (2, 3)]):
        values, indices = torch.topk(other, 2, dim=-1)
    assert torch.equal(indices, torch.cat([expected_first[1:4], expected_second[2:3]]))
    assert torch.equal(values, other.gather(-1, indices))
    assert torch.equal(torch.topk(other, 2).indices, other.argsort(descending=True)[:, :2])


def test_choices_of_another_size_are_left_alone() -> None:
    choices = ExpertChoices()
    with choices.record():
        torch.topk(torch.rand(7, 7), 1)  # of a vision tower, over patches
        expected = torch.topk(scores([0.0, 1.0, 2.0], [2.0, 1.0, 0.0]), 2).indices
    with choices.replay([(0, 2)]):
        one = torch.topk(scores([5.0, 6.0, 7.0, 8.0]), 3).indices
        followed = torch.topk(scores([2.0, 1.0, 0.0], [0.0, 1.0, 2.0]), 2).indices
        after = torch.topk(scores([2.0, 1.0, 0.0], [0.0, 1.0, 2.0]), 2).indices
    assert one.tolist() == [[3, 2, 1]]
    assert torch.equal(followed, expected)
    assert after.tolist() == [[0, 1], [2, 1]]
