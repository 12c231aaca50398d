"""The Ray side: worker groups, the run actor, local and remote clusters."""
