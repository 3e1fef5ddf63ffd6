"""The engine on a virtual clock: the same scheduler, policies and rounds, with drawn acceptances and computed times."""
