"""Acceptance methods: which draft tokens stay, and which token follows them."""
