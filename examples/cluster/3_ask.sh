#!/bin/sh
# One request with its statistics, then the status of the nodes.
curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
  -d '{"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0, "include_speculation_stats": true}'
echo
cospec node status http://127.0.0.1:8000
