"""The results of a run for people: figures, files, pages, and differences between runs."""
