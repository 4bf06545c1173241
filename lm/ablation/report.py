def write_report(results):
    (results.folder / "report.html").write_text("x")
