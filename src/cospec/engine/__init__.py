"""The loop: plan, propose, score, judge, commit, emit."""
