"""A plug-in for cospec: one drafter, one policy, one acceptance method and one blend."""
