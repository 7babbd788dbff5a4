"""What `make test` leaves out beside the tests that are marked `slow`; `make test-all` runs it.

Whole runs take most of the time, and often show what units show, too. `mark_slow` in `selection.py`
says how names of cases are read.
"""

from __future__ import annotations

# Of these files, only what is named: a test for each promise, and one for each command.
IN_MAKE_TEST: dict[str, tuple[str, ...]] = {
    # Killed anywhere, a run ends with the same bytes, and no checkpoint is lost.
    "training/test_exactness.py": (
        "test_resume_after_every_step_is_bitwise_equal",
        "test_any_split_of_the_global_batch_trains_the_same_model",
        "test_a_task_may_draw_from_any_generator_and_change_gradients",
    ),
    "training/evaluation/test_random_evaluation.py": (
        "test_a_random_evaluation_repeats_itself_and_moves_no_generator",
    ),
    "training/test_running.py": ("test_a_loop_that_is_left_early_is_saved_and_resumes_exactly",),
    "training/test_trainer_paths.py": ("test_a_hand_written_loop_gives_the_same_weights",),
    "faults/test_cache_in_use.py": (),
    "faults/test_dead_processes.py": (),
    "faults/test_little_data.py": (),
    "faults/test_moved_folder.py": (
        "test_a_moved_folder_is_not_made_again_and_the_run_resumes_where_it_is",
    ),
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
        "test_numbers_that_are_not_powers_of_two_are_refused[*]",
        "test_a_model_that_normalises_over_processes_is_refused",
        "test_a_buffer_that_grows_is_refused_by_name",
        "test_a_run_is_not_continued_with_what_gives_other_bits",
    ),
    "training/tasks/test_pairs.py": ("test_pairs_of_all_processes_train_the_model_of_one",),
    "distributed/test_fsdp.py": ("test_sharded_weights_train_evaluate_and_export_like_whole_ones",),
    "distributed/test_fsdp_models.py": (),
    "distributed/test_launch.py": (
        "test_launch_trains_as_any_other_launcher_and_hands_back_the_result",
        "test_launch_takes_any_function_and_processes_know_their_place",
        "test_below_another_launcher_the_processes_are_there_already",
        "test_an_accelerator_of_the_user_s_own_joins_the_launched_processes",
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
    "checks/test_rehearsal.py": (
        "test_state_that_a_resume_would_lose_ends_the_run_with_its_first_step",
        "test_a_parameter_that_differs_by_process_ends_the_run",
        "test_nothing_is_said_of_honest_parts_and_they_resume_bit_for_bit",
    ),
    "checks/test_rehearsal_on_processes.py": (
        "test_an_optimizer_that_differs_by_process_or_hides_in_shards_is_named",
        "test_a_training_mode_that_differs_by_process_ends_the_run",
    ),
    "training/test_pretend_device.py": (),
    "training/test_ends.py": (
        "test_a_signal_in_the_last_evaluation_costs_nothing",
        "test_a_record_that_is_missing_or_old_is_made_by_the_next_start",
        "test_each_of_two_callbacks_of_one_class_finds_its_own_state",
    ),
    "training/evaluation/test_evaluation_interval.py": (
        "test_fractions_that_floats_cannot_hold_miss_no_evaluation",
        "test_a_run_has_a_row_for_each_evaluation",
        "test_the_best_evaluation_within_an_epoch_is_kept_and_exported",
    ),
    "callbacks/test_own_numbers.py": (
        "test_a_row_has_what_was_logged_up_to_its_step",
        "test_what_an_evaluation_logs_is_in_the_next_row_or_in_a_last_one",
        "test_a_name_of_the_engine_ends_the_run_in_one_line",
    ),
    "callbacks/test_trackers.py": (
        "test_a_run_killed_twice_has_each_row_once_in_its_tracker",
        "test_a_tracker_that_cannot_be_used_is_one_line_before_training",
    ),
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
        "test_names_from_a_run_are_text_and_not_markup",
    ),
    "cli/test_export.py": (
        "test_an_export_loads_back_as_the_module_that_was_trained",
        "test_an_export_and_a_run_are_verified",
        "test_one_changed_weight_fails",
        "test_a_picture_gets_labels_with_confidence",
    ),
    "cli/test_export_own.py": (),
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
        "test_a_forged_start_is_one_line_and_starts_nothing[*]",
    ),
    "lab/chaos/test_chaos.py": ("test_state_of_a_callback_is_named_with_the_first_difference",),
    "lab/replay/test_at.py": ("test_at_rebuilds_the_bits_of_a_run_that_stopped_there",),
    "lab/replay/test_bisect.py": ("test_the_step_and_the_sample_behind_a_mean_are_found",),
    "lab/replay/test_probe.py": ("test_a_probe_logs_the_bits_that_it_would_have_logged_live",),
    "lab/replay/test_replay.py": (),
    "lab/why/test_why.py": (
        "test_equal_runs_are_equal_without_training",
        "test_runs_without_a_step_are_not_equal",
    ),
    "cli/plan/test_plan.py": (
        "test_a_run_does_what_was_planned",
        "test_the_costs_of_a_run_add_up_from_its_parts",
        "test_bad_input_is_one_line[*]",
    ),
    "cli/recipe/test_dry_run.py": (
        "test_a_dry_run_of_a_recipe_says_what_it_compared_and_leaves_nothing",
    ),
    "cli/watch/test_watch.py": (
        "test_readers_are_told_of_news_and_get_the_new_page",
        "test_nothing_is_read_without_the_token",
        "test_a_malformed_run_is_one_line_of_text_and_the_server_goes_on",
    ),
    "cli/test_terminal.py": (),
    "cli/test_strangers_folder.py": (
        "test_a_look_at_a_strangers_folder_is_one_line_and_changes_nothing[*]",
    ),
    # What stands in the documentation works.
    "docs/test_site.py": (),
    "test_own_recipes.py": ("test_a_recipe_is_short",),
    "vision/test_photo_recipe.py": (),
    "data/test_order_of_runs.py": (),
}

# Of other files, all but these: they start processes, or vary what other cases show.
NOT_IN_MAKE_TEST: dict[str, tuple[str, ...]] = {
    "callbacks/test_metric_logger.py": (
        "test_means_cover_all_processes_and_move_to_any_number_of_them",
    ),
    "callbacks/test_progress_bar.py": ("test_lines_in_a_file_say_how_it_goes_and_what_is_left",),
    "checkpoint/test_optimizer_state.py": (
        "test_a_resume_with_another_order_of_groups_has_the_same_bits[1:]",
    ),
    "checkpoint/test_sharded.py": (
        "test_files_of_another_number_of_processes_are_ignored_or_refused",
        "test_all_processes_pass_over_a_checkpoint_with_a_damaged_slice",
    ),
    "cli/common/test_own_files.py": ("test_a_report_replaces_no_picture_beside_it",),
    "cli/recipe/test_main.py": (
        "test_a_process_that_fails_before_it_connects_reports_its_own_error",
    ),
    "cli/runs/test_recorded_start.py": ("test_the_list_keeps_the_newest_10_000_starts",),
    "cli/test_doctor.py": (
        "test_a_failed_run_is_explained_by_its_last_error",
        "test_a_process_that_cannot_connect_reports_it_within_the_timeout",
        "test_processes_are_compared_and_the_network_between_them_is_measured",
    ),
    "cli/test_origin.py": ("test_a_resumed_run_still_says_what_it_started_from",),
    "cli/test_unpatched.py": ("test_a_command_replaces_nothing_in_the_process_that_trains[1:]",),
    "callbacks/test_console.py": ("test_what_a_recipe_prints_last_changes_no_exit_code",),
    "core/test_digest.py": ("test_one_and_two_processes_have_the_same_digests",),
    "data/test_fingerprint.py": ("test_the_fingerprint_of_objects_is_the_same_in_another_process",),
    "data/test_loader.py": (
        "test_a_data_worker_that_dies_or_hangs_ends_with_the_sample_it_was_at[1:]",
    ),
    "data/test_reader.py": ("test_rows_of_a_database_train_to_the_same_bits_however_they_run",),
    "distributed/test_collectives.py": (
        "test_processes_wait_for_the_main_process_while_it_shows_life[1:]",
    ),
    "distributed/test_determinism.py": ("test_a_checkout_without_an_install_has_versions",),
    "docs/test_blocks.py": (
        "test_a_page_runs_from_top_to_bottom[docs/metrics.md]",
        "test_a_page_runs_from_top_to_bottom[docs/models.md]",
        "test_a_page_runs_from_top_to_bottom[docs/replay.md]",
        "test_a_page_runs_from_top_to_bottom[docs/runs.md]",
        "test_a_page_runs_from_top_to_bottom[docs/why_runs_differ.md]",
    ),
    "fault_tolerance/test_preemption.py": (
        "test_a_signal_in_the_start_is_no_error_of_what_it_interrupts[1:]",
    ),
    "faults/test_io_errors.py": ("test_an_error_at_any_change_of_a_save_is_survived[1:]",),
    "faults/test_power_loss.py": (
        "test_a_save_protocol_with_a_step_left_out_loses_checkpoints[1:]",
    ),
    "faults/test_several_runs.py": (
        "test_no_run_follows_a_signal_and_the_same_program_continues[1:]",
        "test_a_script_ends_in_one_line_once_its_threads_have_ended",
    ),
    "lab/chaos/test_script.py": (
        "test_a_program_that_resumes_right_survives_two_kills_in_one_run",
        "test_a_resume_that_fails_is_shown_with_what_it_said",
        "test_a_program_that_does_not_repeat_itself_is_not_killed",
        "test_a_checkpoint_that_a_kill_cut_off_is_not_resumed",
    ),
    "lab/compare/test_paired.py": (
        "test_where_nothing_differs_one_in_twenty_comparisons_decides[1:]",
    ),
    "lab/finish/test_finish.py": ("test_the_same_command_continues_an_ending_that_was_killed",),
    "optim/test_evaluation_weights.py": (
        "test_evaluating_more_often_trains_the_same_weights_of_schedule_free",
        "test_a_schedule_free_run_resumes_and_exports_what_it_evaluates",
    ),
    "optim/test_fused.py": (
        "test_a_run_with_views_half_and_late_parameters_resumes",
        "test_a_run_with_weight_norm_resumes_with_its_ema",
    ),
    "run/test_bad_inputs.py": ("test_what_only_looks_wrong_works[1:]",),
    "run/test_eval_sets.py": (
        "test_a_set_is_measured_as_if_it_were_the_only_one",
        "test_sets_and_metrics_that_cannot_be_are_one_line_before_any_step[1:]",
    ),
    "run/test_final_test.py": ("test_shards_of_the_best_weights_are_tested_on_two_processes",),
    "run/test_frozen.py": (
        "test_a_teacher_is_averaged_and_resumed_as_if_nothing_were_shared[1:]",
        "test_what_is_damaged_is_taken_from_the_model_as_it_was_built[1:]",
    ),
    "run/test_metadata.py": (
        "test_a_callback_may_change_the_metadata_and_the_main_process_decides[1:]",
    ),
    "run/test_mistakes.py": (
        "test_an_error_in_the_code_of_one_process_has_its_exit_code_on_all",
        "test_an_error_in_the_users_code_is_shown_as_theirs[1:]",
    ),
    "run/test_provenance.py": (
        "test_a_change_since_the_commit_is_only_in_the_copy_of_the_recipe",
        "test_what_the_messages_between_processes_go_by_is_recorded",
    ),
    "training/strategy/test_data_parallel.py": (
        "test_a_run_that_unfreezes_on_two_processes_resumes_exactly",
    ),
    "training/test_compile.py": ("test_more_shapes_than_torchs_recompile_limit_are_all_compiled",),
    "training/test_items.py": ("test_a_padded_language_model_trains_as_in_one_batch[1:]",),
    "training/evaluation/test_many_classes.py": (
        "test_checkpoints_of_10000_classes_grow_by_the_weights_only",
        "test_report_and_result_of_many_classes_name_the_evaluation_file",
    ),
    "training/evaluation/test_metric_adapters.py": (
        "test_a_metric_of_evaluate_is_the_same_on_every_process",
        "test_a_metric_of_torchmetrics_adds_up_over_joined_processes",
    ),
    "training/step/test_mixed_precision.py": (
        "test_bfloat16_is_what_layers_compute_in_and_not_what_weights_are[1:]",
    ),
    "training/step/test_nonfinite_report.py": (
        "test_a_skipped_step_leaves_no_trace_and_training_goes_on[1:]",
        "test_replay_repeats_the_step_and_does_not_change_the_run",
    ),
    "training/test_orders.py": (
        "test_a_resume_in_another_order_has_the_same_bits",
        "test_a_run_is_killed_and_resumed_with_other_hash_seeds",
    ),
    "training/test_own_states.py": ("test_a_state_that_differs_by_process_ends_the_run",),
    "training/step/test_own_steps.py": (
        "test_a_schedule_for_a_group_resumes_to_the_same_bytes",
        "test_steps_of_ones_own_are_the_same_on_one_and_two_processes",
    ),
    "training/step/test_sums.py": ("test_exact_sums_of_sums_have_the_same_bytes",),
    "training/test_position.py": (
        "test_progress_is_0_on_a_trunk_and_the_fraction_done_of_its_decay",
    ),
    "training/step/test_recomputation.py": (
        "test_recomputed_forwards_leave_the_bits_of_plain_ones[1:]",
    ),
    "training/step/test_step.py": (
        "test_a_profiler_sees_each_step_of_a_run",
        "test_hooks_see_each_step_of_a_run[1:]",
    ),
    "training/step/test_step_check.py": (
        "test_a_step_that_never_repeats_itself_is_told_from_a_device",
        "test_checked_steps_leave_the_same_bytes",
    ),
    "training/test_steps.py": (
        "test_a_stop_before_the_last_step_changes_neither_schedule_nor_rows",
    ),
    "training/step/test_targets.py": ("test_bad_labels_at_hand_are_refused_before_the_first_step",),
    "training/test_trainer.py": ("test_patience_counts_across_restarts",),
    "training/step/test_turns.py": (
        "test_exact_sums_give_the_same_bytes_on_one_and_two_processes",
        "test_two_processes_train_the_networks_of_one[1:]",
        "test_muon_and_adamw_side_by_side_resume_to_the_same_bytes",
        "test_a_turn_may_be_computed_twice",
    ),
    "training/step/test_updates.py": (
        "test_a_gan_trains_the_same_on_two_processes",
        "test_exact_sums_of_updates_are_the_same_on_one_and_two_processes",
        "test_an_update_may_be_computed_twice",
        "test_an_update_that_is_skipped_leaves_the_others[1:]",
    ),
    "checks/test_unsaved_parts.py": (
        "test_a_callback_that_changes_the_model_is_named_with_what_it_changes",
        "test_a_loss_that_depends_on_other_samples_is_named",
    ),
    "vision/sources/test_labels.py": (
        "test_generated_tables_have_their_own_classes_or_are_refused",
        "test_a_column_that_is_called_like_labels_is_used_or_is_the_error",
    ),
    "vision/sources/test_metadata.py": ("test_generated_labels_are_the_texts_that_were_written",),
    "vision/test_augment.py": (
        "test_mixes_are_the_same_to_the_last_bit_in_batches_of_any_size[1:]",
    ),
    "vision/test_bad_images.py": (
        "test_bad_images_are_listed_and_epochs_are_as_long_on_all_processes",
    ),
    "vision/test_cache.py": ("test_a_build_that_is_killed_anywhere_continues_with_the_same_bytes",),
    "vision/test_one_decoder.py": (
        "test_all_that_read_a_picture_come_to_the_same_pixels_or_error",
    ),
    "vision/test_photo_augment.py": (
        "test_random_resized_boxes_are_those_of_the_obvious_algorithm[1:]",
        "test_a_random_box_is_erased_with_the_given_probability",
    ),
    "vision/test_photo_reader.py": (
        "test_photos_have_the_same_pixels_for_any_processes_and_workers[1:]",
        "test_an_epoch_of_photos_may_be_entered_at_any_step[1:]",
    ),
    "vision/test_photos.py": ("test_a_split_is_sent_to_another_process_without_its_photos",),
    "vision/test_rules.py": ("test_a_killed_run_keeps_its_settings_though_the_rules_change",),
    "vision/test_strange_data.py": (
        "test_a_table_whose_path_datasets_would_change_is_refused[1:]",
        "test_photos_with_odd_names_are_found_by_metadata",
    ),
    "vision/test_zoo.py": (
        "test_dropout_drops_its_fraction_only_in_training[1:]",
        "test_large_nets_do_the_work_of_their_papers_at_224_pixels[1:]",
    ),
    "test_benchmarks.py": ("test_a_benchmark_runs_with_tiny_sizes[1:]",),
    # Tests of what the tests are made of.
    "test_promises.py": ("test_a_broken_function_is_still_python_and_a_missing_one_is_named",),
    "test_reaper.py": ("test_a_test_run_that_is_killed_leaves_no_process_behind",),
    "test_forked_python.py": (
        "test_forked_python_buffers_and_encodes_as_python_does",
        "test_a_client_killed_before_it_knows_its_process_takes_it_along",
        "test_a_signal_reaches_the_process_that_was_forked",
    ),
    "test_processes.py": ("test_threads_that_start_processes_at_once_read_each_exit_code",),
}
