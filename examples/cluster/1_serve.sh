#!/bin/sh
# The target. Drafter nodes join at tcp://127.0.0.1:5710.
exec cospec serve --port 8000 --speculative-config \
  '{"method": "draft_model", "num_speculative_tokens": 4, "drafter_executor": "node",
    "drafter_nodes": {"bind": "tcp://127.0.0.1:5710"}}'
