"""Files whose tests are whole runs, or many short ones: dear, and often of what units show, too.

`make test` runs those that are named here: one for each promise, and one for each command. A name
stands for the first case of a test that is not slow, `name[*]` for all of these, `name[case]` for
that one. `make test-all` runs all.
"""

from __future__ import annotations

IN_MAKE_TEST: dict[str, tuple[str, ...]] = {
    # Killed anywhere, a run ends with the same bytes, and no checkpoint is lost.
    "training/test_exactness.py": (
        "test_resume_after_every_step_is_bitwise_equal",
        "test_any_split_of_the_global_batch_trains_the_same_model",
        "test_a_preemption_at_any_step_leaves_out_no_evaluation",
        "test_a_task_may_draw_from_any_generator_and_change_gradients",
    ),
    "training/test_interrupted_evaluation.py": (
        "test_an_interruption_around_an_evaluation_changes_nothing",
    ),
    "training/test_random_evaluation.py": (),
    "training/test_running.py": ("test_a_loop_that_is_left_early_is_saved_and_resumes_exactly",),
    "training/test_trainer_paths.py": ("test_a_hand_written_loop_gives_the_same_weights",),
    "faults/test_cache_in_use.py": (),
    "faults/test_crash.py": (),
    "faults/test_dead_processes.py": (),
    "faults/test_interruptions.py": (),
    "faults/test_little_data.py": (),
    "faults/test_moved_folder.py": (
        "test_a_moved_folder_is_not_made_again_and_the_run_resumes_where_it_is",
    ),
    "faults/test_pack_kills.py": (),
    "faults/test_photo_damage.py": (),
    "faults/test_run_disk.py": (
        "test_no_room_for_a_checkpoint_ends_the_run_before_the_first_step",
    ),
    "faults/test_save_signals.py": ("test_usr2_saves_once_and_the_run_ends_with_the_same_bytes",),
    "faults/test_signals.py": (
        "test_a_signal_loses_nothing_and_leaves_nothing[TERM-save-rank-1]",
        "test_a_signal_loses_nothing_and_leaves_nothing[INT-step-group-2]",
        "test_a_signal_before_there_are_handlers_is_a_preemption",
    ),
    "faults/test_user_code.py": ("test_a_bad_sample_of_one_process_ends_both_and_is_named",),
    "fault_tolerance/test_watchdog.py": (
        "test_a_stuck_timeout_ends_a_process_and_shows_its_stacks",
    ),
    # One, two and four processes train the same model, in floats and exactly; whole and in shards.
    "training/strategy/test_exact.py": (
        "test_a_process_adds_up_in_pairs_with_one_partial_sum_for_each_level[*]",
        "test_a_run_leaves_the_same_bytes_on_1_2_and_4_processes",
        "test_an_exact_run_killed_and_resumed_elsewhere_has_the_same_bytes",
        "test_an_integer_buffer_that_depends_on_the_data_is_refused_on_all",
        "test_a_run_is_not_continued_with_what_gives_other_bits",
    ),
    "training/test_pairs.py": ("test_pairs_of_all_processes_train_the_model_of_one",),
    "distributed/test_fsdp.py": (
        "test_sharded_weights_train_evaluate_and_export_like_whole_ones",
        "test_an_interrupted_sharded_run_ends_with_the_same_bytes",
    ),
    "distributed/test_fsdp_models.py": (),
    "distributed/test_launch.py": (
        "test_launch_trains_as_any_other_launcher_and_hands_back_the_result",
        "test_what_a_process_raises_comes_back",
    ),
    "distributed/test_launchers.py": ("test_every_preset_is_launched",),
    "distributed/test_elastic.py": (),
    "distributed/test_two_machines.py": (),
    "distributed/test_sync_batch_norm.py": (
        "test_any_split_of_a_batch_is_normalised_like_the_whole_one",
        "test_half_precision_is_normalised_in_float32_and_keeps_its_dtype",
        "test_conversion_keeps_names_tensors_modes_and_other_modules",
    ),
    "distributed/test_process_group.py": (
        "test_processes_that_cannot_be_reached_are_named_by_their_address",
    ),
    "faults/test_sharded_faults.py": (
        "test_a_kill_of_any_process_in_a_save_loses_nothing",
        "test_a_process_that_cannot_write_or_sync_votes_no_and_nobody_commits",
    ),
    # What a resume would lose is named, and honest parts are not.
    "training/test_rehearsal.py": (
        "test_state_that_a_resume_would_lose_ends_the_run_with_its_first_step",
        "test_state_that_no_checkpoint_holds_is_named_in_one_line",
        "test_a_parameter_that_differs_by_process_ends_the_run",
        "test_nothing_is_said_of_honest_parts_and_they_resume_bit_for_bit",
    ),
    "training/test_rehearsal_on_processes.py": (),
    "training/test_pretend_device.py": (
        "test_the_pretend_device_has_the_bits_of_the_cpu_and_waits_for_no_step",
    ),
    "callbacks/test_trackers.py": (
        "test_a_run_killed_twice_has_each_row_once_in_its_tracker",
        "test_a_tracker_that_cannot_be_used_is_one_line_before_training",
    ),
    "callbacks/test_export.py": ("test_an_export_has_the_best_weights_that_there_are",),
    "callbacks/test_profiler.py": (),
    "run/test_session.py": (
        "test_the_same_command_continues_its_run_and_a_finished_one_says_so",
        "test_a_run_branches_from_a_checkpoint_of_another_and_ends_the_same",
        "test_damaged_checkpoints_never_mean_a_silent_start_from_scratch",
        "test_a_damaged_newest_checkpoint_is_passed_over_loudly",
        "test_two_runs_do_not_share_a_folder",
        "test_a_changed_config_is_listed_with_the_flag_that_allows_it",
        "test_other_data_is_refused_unless_allowed",
    ),
    # Each command works as users start it.
    "cli/test_report.py": (
        "test_a_report_is_one_file_that_loads_nothing",
        "test_only_the_pages_own_script_may_run_and_nothing_may_be_loaded",
        "test_names_from_a_run_are_text_and_not_markup",
        "test_a_run_without_images_or_an_end_has_a_report_of_what_there_is",
    ),
    "cli/test_export.py": (
        "test_an_export_loads_back_as_the_module_that_was_trained",
        "test_an_export_and_a_run_are_verified",
        "test_one_changed_weight_fails",
        "test_a_picture_gets_labels_with_confidence",
    ),
    "cli/test_export_own.py": ("test_a_users_own_model_is_verified_without_its_class",),
    "cli/test_card_code.py": (),
    "cli/test_named_sets.py": (),
    "cli/test_new.py": (
        "test_a_new_project_has_presets_a_config_and_a_readme[*]",
        "test_a_folder_that_exists_is_left_alone",
        "test_a_folder_that_cannot_be_made_is_one_line[*]",
    ),
    "cli/test_evaluate.py": (
        "test_a_run_gets_the_numbers_of_its_own_evaluation_bit_for_bit",
        "test_classes_are_matched_by_name_in_any_order_and_number",
    ),
    "cli/test_unfinished.py": ("test_an_unfinished_run_is_used_by_its_best_checkpoint_so_far",),
    "cli/test_sweep.py": (
        "test_a_sweep_is_over_the_flags_with_several_values",
        "test_a_mistake_is_found_before_any_run[*]",
        "test_a_sweep_tables_mean_and_spread_and_trains_no_finished_run_again",
    ),
    "cli/test_pack.py": (
        "test_a_packed_dataset_has_the_splits_classes_and_order_of_its_source",
        "test_killed_anywhere_and_started_again_it_writes_the_same_bytes",
    ),
    "cli/test_lr_find.py": (
        "test_lr_find_suggests_the_steepest_fall_up_to_a_tenth_of_divergence",
        "test_a_recipe_is_ramped_without_a_trace_but_the_picture",
    ),
    "cli/test_rerun.py": (
        "test_a_run_on_digits_comes_out_the_same_again",
        "test_what_cannot_be_run_again_is_said_before_any_work",
    ),
    "cli/chaos/test_chaos.py": ("test_state_of_a_callback_is_named_with_the_first_difference",),
    "cli/audit/test_audit.py": (
        "test_an_honest_run_passes",
        "test_a_forgery_is_named_without_training[*]",
        "test_no_program_of_the_folder_is_run",
    ),
    "cli/effect/test_effect.py": (
        "test_what_changes_the_result_is_told_from_what_does_later_or_never",
    ),
    "cli/replay/test_at.py": ("test_at_rebuilds_the_bits_of_a_run_that_stopped_there",),
    "cli/replay/test_bisect.py": ("test_the_step_and_the_sample_behind_a_mean_are_found",),
    "cli/replay/test_probe.py": ("test_a_probe_logs_the_bits_that_it_would_have_logged_live",),
    "cli/replay/test_replay.py": (),
    "cli/why/test_why.py": (
        "test_equal_runs_are_equal_without_training",
        "test_an_operator_that_draws_unseeded_numbers_is_named",
    ),
    "cli/plan/test_plan.py": (
        "test_a_run_does_what_was_planned",
        "test_the_costs_of_a_run_add_up_from_its_parts",
        "test_what_fits_into_some_hours_is_said[*]",
        "test_bad_input_is_one_line[*]",
    ),
    "cli/recipe/test_dry_run.py": (
        "test_a_dry_run_of_a_recipe_says_what_it_compared_and_leaves_nothing",
        "test_what_a_resume_would_lose_fails_the_dry_run_and_is_named",
    ),
    "cli/watch/test_watch.py": (
        "test_readers_are_told_of_news_and_get_the_new_page",
        "test_nothing_is_read_without_the_token",
        "test_a_malformed_run_is_one_line_of_text_and_the_server_goes_on",
    ),
    "cli/test_terminal.py": ("test_the_lines_of_commands_fit_the_terminal",),
    "cli/test_strangers_folder.py": (
        "test_a_look_at_a_strangers_folder_is_one_line_and_changes_nothing[*]",
    ),
    # What stands in the documentation works.
    "docs/test_site.py": (),
    "test_own_recipes.py": ("test_a_recipe_is_short",),
    "vision/test_photo_recipe.py": (),
    "data/test_order_of_runs.py": (),
}
