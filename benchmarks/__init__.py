"""Side by side with what people use today: ``make bench``."""
