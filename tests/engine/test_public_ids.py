"""One place knows what an id of a client may mean."""

from __future__ import annotations

import pytest

from serve.engine.public_ids import PREFIXES, answer_ids, answer_of, choice_label


@pytest.mark.parametrize("prefix", PREFIXES)
def test_an_answer_goes_by_its_id_and_by_its_requests(prefix: str) -> None:
    answer_id = f"{prefix}mine-7"
    assert answer_id in answer_ids("mine-7") & answer_ids(answer_id)
    assert answer_id not in answer_ids("mine") | answer_ids("7") | answer_ids(f"x{answer_id}")


def test_a_choice_is_named_by_its_number_when_there_are_several() -> None:
    assert answer_of(choice_label("cmpl-a", 11)) == "cmpl-a"
    assert answer_of("cmpl-a") is None
    assert answer_of("cmpl-a-") is None
