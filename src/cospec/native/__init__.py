"""The native library: loading, structs, operators, several steps in one call."""
