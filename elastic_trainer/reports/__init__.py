"""What a run was like, for people: in words and in pictures."""
