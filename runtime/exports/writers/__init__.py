"""Writers: the files of an export, lines or Parquet, with a journal from which it resumes."""
