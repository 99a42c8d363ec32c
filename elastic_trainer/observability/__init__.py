"""What everybody may use to tell what happens: lines, journal, progress."""
