"""DFlash drafts: block diffusion behind context rows that the hidden states of a target give."""
