"""What an experiment is: parameters, result with named tables, records, output, files, report tables."""
