"""A model's own prediction head (`mtp.*`) as a draft: one layer of attention that says one token after the other."""
