"""Running models: loading, the packed forward, the KV cache, and the back ends of attention and linear layers."""
