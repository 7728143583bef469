"""What can be set for a run, what is wrong with it, and what a real server says of itself.

In go flags, TOML files, a server's command line and its start-up log. Out comes one flat
`config.RunConfig`, with each value's origin. Names of policies become classes in `library`.
"""
