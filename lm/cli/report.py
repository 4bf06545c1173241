def print_results(results, json, exit_code="done"):
    print(results.contrasts[["arm","baseline","n_seeds","mean_difference","verdict","sentence"]].to_string()); return 0
