"""From a configuration to an engine: loaded models, a drafter, a policy, and the components around them."""
