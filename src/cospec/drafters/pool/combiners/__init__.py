"""How the drafts of several drafters become one."""
