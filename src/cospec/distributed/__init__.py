"""The target sharded over processes: pipeline stages, shards of a stage, and the links between them."""
