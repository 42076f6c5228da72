"""What benchmarks record, and the page and the chart that are made from it."""
