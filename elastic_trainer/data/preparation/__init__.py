"""Raw files to dataset folders: sources -> readers -> columns -> shuffle -> data files, as one job."""
