"""Side by side with what people use today: ``spherical-loss bench``, or ``make bench``."""
