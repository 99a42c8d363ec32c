"""Side-by-side measurements, each with the checks that make its figures count."""
