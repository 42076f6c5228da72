"""Matrix products of our own in C, whose bits are fixed by what they are; compiled at installation, where it can be."""
