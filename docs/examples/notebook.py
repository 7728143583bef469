"""Two runs in a notebook: figures, charts, and why they differ.

Paste the cells into a notebook (`pip install 'kvsim[notebook]'`), or run the file:

    python docs/examples/notebook.py
"""

# %% A run: its last line shows the result as a table.
import kvsim

load = {"num_prompts": 300, "max_model_len": 8192}
small = kvsim.simulate("chat", {**load, "num_gpu_blocks_override": 900})
small  # noqa: B018

# %% The same requests with more blocks. What changed, and why?
large = kvsim.simulate("chat", {**load, "num_gpu_blocks_override": 1500})
both = small.compare(large, ("small", "large"))
print(both)

# %% Every figure as a table of pandas.
print(both.frame().loc[["p99_ttft_ms", "num_preemptions"]])

# %% Requests and steps are tables, too.
slowest = small.requests_frame().nlargest(3, "ttft_s")
print(slowest[["id", "input_length", "ttft_s"]])

# %% The charts of the report: all over time, or one by its name.
small.plot()
small.plot("dist-ttft")
