"""Rows are cut only where a block of every step ends."""

from finetune_trainer.merge.chunks import RowCut, common_cuts


def test_blocks_of_one_step_are_the_cuts() -> None:
    assert common_cuts([[(0, 4), (4, 6)]]) == [RowCut((0, 4), (((0, 4),),)), RowCut((4, 6), (((4, 6),),))]


def test_a_cut_holds_all_blocks_of_every_step_within_it() -> None:
    assert common_cuts([[(0, 2), (2, 4), (4, 6)], [(0, 4), (4, 6)]]) == [
        RowCut((0, 4), (((0, 2), (2, 4)), ((0, 4),))),
        RowCut((4, 6), (((4, 6),), ((4, 6),))),
    ]


def test_a_step_that_needs_all_rows_leaves_one_cut() -> None:
    assert common_cuts([[(0, 3), (3, 6)], [(0, 6)]]) == [RowCut((0, 6), (((0, 3), (3, 6)), ((0, 6),)))]
