import math

from tiny import tiny_run

from kvsim.report.frames import requests_frame, steps_frame
from kvsim.schema import STEP_COLUMNS


def test_frames_have_the_columns_of_the_files():
    steps, requests, _, _ = tiny_run()
    frame = requests_frame(requests)
    assert list(frame["id"]) == ["A", "B", "C", "D"]
    assert frame["ttft_s"][0] == 0.02
    assert math.isnan(frame["ttft_s"][3])
    assert list(steps_frame(steps).columns) == ["start_s", "end_s", *STEP_COLUMNS]
    assert len(steps_frame(steps)) == 7
