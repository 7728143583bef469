"""Makes profiles from kernel times that others measured, for the table cost model.

Every importer returns a `kvsim.cost.profile.Profile`; `kvsim.cost.profile.to_json` writes its file.
"""
