"""What a run amounted to: figures, files, pages, differences between runs."""
