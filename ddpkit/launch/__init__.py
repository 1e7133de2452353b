"""Who started this process, as which rank; and starting ranks without a launcher."""
