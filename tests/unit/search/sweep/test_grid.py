"""From what is to be tried to points."""

import pytest

from kvsim.errors import ConfigError
from kvsim.search.grid import expand, parse_space

GRID = ["watermark=0,0.01,0.05", "preemption_mode=recompute,swap"]


def settings(*arguments, **options):
    return [point.settings for point in expand(parse_space(*arguments, **options), {})]


def test_a_grid_is_every_combination_the_last_fastest():
    points = expand(parse_space(GRID), {"max_num_seqs": 7})
    assert [tuple(point.settings.values()) for point in points] == [
        (w, mode) for w in (0, 0.01, 0.05) for mode in ("recompute", "swap")
    ]
    for point in points:
        assert point.config.watermark == point.settings["watermark"]
        assert point.config.preemption_mode == point.settings["preemption_mode"]
        assert point.config.max_num_seqs == 7


def test_lists_are_taken_row_by_row():
    lists = ["watermark=0,0.01,0.02", "max_num_seqs=8,9, 8"]
    assert settings((), lists) == [
        {"watermark": 0, "max_num_seqs": 8},
        {"watermark": 0.01, "max_num_seqs": 9},
        {"watermark": 0.02, "max_num_seqs": 8},
    ]


def test_values_in_brackets_may_come_twice_in_a_list():
    lists = ["max_num_seqs=1,2,3", "scheduler_args.weights=[1,2],[1,2],[2,1]"]
    assert [each["scheduler_args.weights"] for each in settings((), lists)] == [
        [1, 2],
        [1, 2],
        [2, 1],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "watermark,preemption_mode\n0,swap\n0.01,recompute\n",
        '{"watermark": 0, "preemption_mode": "swap"}\n\n'
        '{"watermark": 0.01, "preemption_mode": "recompute"}\n',
    ],
    ids=["csv", "json"],
)
def test_a_file_of_rows(tmp_path, text):
    path = tmp_path / "rows"
    path.write_text(text)
    assert settings((), [str(path)]) == [
        {"watermark": 0, "preemption_mode": "swap"},
        {"watermark": 0.01, "preemption_mode": "recompute"},
    ]


def test_a_file_may_begin_with_a_byte_order_mark_and_have_cells_of_several_lines(tmp_path):
    path = tmp_path / "rows"
    path.write_text('watermark,cost.model\n\n0,"a\nb"\n0.1,c\n', "utf-8-sig")
    assert settings((), [str(path)]) == [
        {"watermark": 0, "cost.model": "a\nb"},
        {"watermark": 0.1, "cost.model": "c"},
    ]
    path.write_text('{"watermark": 0}\n', "utf-8-sig")
    assert settings((), [str(path)]) == [{"watermark": 0}]


def test_a_release_in_a_file_of_rows_is_no_number(tmp_path):
    path = tmp_path / "rows"
    path.write_text("vllm_version,watermark\n0.10,0.1\n")
    assert settings((), [str(path)]) == [{"vllm_version": "0.10", "watermark": 0.1}]


def test_random_points_depend_on_their_seed_alone():
    laws = ["watermark=uniform(0,0.5)", "max_num_seqs=loguniform(1,100)"]
    first = settings((), (), laws, samples=20)
    assert len(first) == 20
    assert first == settings((), (), laws, samples=20)
    assert first != settings((), (), laws, samples=20, sample_seed=1)
    assert first[:5] == settings((), (), laws, samples=5)


def test_parts_multiply_and_seeds_come_last():
    space = parse_space(
        GRID[:1], ["max_num_seqs=8,9"], ["burstiness=uniform(1,2)"], samples=2, seeds=3
    )
    points = expand(space, {"seed": 4})
    assert len(points) == 3 * 2 * 2 * 3
    assert [point.config.seed for point in points[:4]] == [4, 5, 6, 4]
    assert all("seed" not in point.settings for point in points)


def test_inner_keys_leave_their_neighbours_alone():
    base = {"cost": {"model": "constant", "step_us": 1.0}}
    points = expand(parse_space(["cost.step_us=5,6"]), base)
    assert [point.config.cost for point in points] == [
        {"model": "constant", "step_us": value} for value in (5, 6)
    ]
    assert base == {"cost": {"model": "constant", "step_us": 1.0}}


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (([],), {}, "nothing to sweep"),
        ((["watermark=0", "watermark=1"],), {}, "varied twice"),
        ((["watermark=0"], ["watermark=0.1"]), {}, "varied twice"),
        (((), ["watermark=0,0.1", "max_num_seqs=1,2,3"]), {}, "row by row"),
        (((), ["watermark=0", "rows.csv"]), {}, "stands alone"),
        (((), ["preemption_mode=,"]), {}, "empty"),
        (((), ["/nowhere"]), {}, "/nowhere"),
        ((["watermark=0,1.5"],), {}, "< 1.0"),
        ((["max_num_seqs=1,0"],), {}, ">= 1"),
        ((["max_num_seqs=1,many"],), {}, "many"),
        ((["watermark=0"],), {"samples": 3}, "--random"),
        ((["workload=victims,watermark"],), {}, "share one"),
        ((["seed=0,1"],), {"seeds": 3}, "varied already"),
        ((["seed=lin(0,9999,10000)", "n=lin(1,11,11)"],), {}, "110,000"),
    ],
)
def test_bad_spaces_are_refused(arguments, options, word):
    with pytest.raises(ConfigError) as caught:
        expand(parse_space(*arguments, **options), {})
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no rows"),
        ("watermark\n", "no rows"),
        ("watermrk\n0\n", "rows:2: unknown key 'watermrk'; did you mean 'watermark'"),
        ("watermark,watermark\n0,0\n", "rows:1: a key is given twice"),
        ("watermark,n\n0\n", "rows:2: 1 values for 2 keys"),
        ("watermark\n0\n2\n", "rows:3: watermark"),
        ('victim\n"last\n', "rows:2: not CSV"),
        ('{"watermark": 0}\n{"n": 1}\n', "rows:2: keys n"),
        ('{"watermark": 0}\n{"n"\n', "rows:2: not JSON"),
        ('{"watermark": 0}\n[1]\n', "rows:2: expected an object"),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path, text, word):
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse_space((), [str(path)])
    assert word in str(caught.value)
