"""Pictures of what the benchmarks measured: each module draws one kind, from rows of the JSON."""
