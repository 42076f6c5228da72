"""`rekindle doctor`: what this machine is to Rekindle, and what is wrong with it, each fault with its remedy."""
