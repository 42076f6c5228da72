"""`rekindle cache`: what a cache folder holds, whether it is whole, and making it smaller."""
