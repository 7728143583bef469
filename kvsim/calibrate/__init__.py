"""Makes profiles: reads kernel times that others measured into what a table cost model prices with.

Every importer answers a `kvsim.cost.profile.Profile`; `document.to_json` is its file.
"""
