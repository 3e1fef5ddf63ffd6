"""Several machines or processes as one server: Ray places and supervises processes. The only importer of ray."""
