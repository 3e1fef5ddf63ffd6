"""Running models: loading, the packed forward, the KV cache, and the back ends for attention and linear layers."""
