
/// What this program reads in each command of a file, a line of JSON each; nothing is started.
///
/// HOMENODE_COMMANDS names the file: a JSON list of lists of words.
fn print_what_is_read() -> bool {
    let Some(path) = std::env::var_os("HOMENODE_COMMANDS") else {
        return false;
    };
    let text = std::fs::read_to_string(path).unwrap();
    let commands: Vec<Vec<String>> = serde_json::from_str(&text).unwrap();
    for command in commands {
        let (vcpus, memory, rng) = prepare_default_values();
        let read = create_app(vcpus, memory, rng)
            .try_get_matches_from(command)
            .map_err(|error| error.to_string())
            .and_then(|words| {
                vmm::vm_config::VmConfig::parse(VmParams::from_arg_matches(&words))
                    .map_err(|error| format!("{error:?}"))
            })
            .and_then(|mut config| {
                config.validate().map_err(|error| format!("{error:?}"))?;
                Ok(serde_json::to_value(&config).unwrap())
            });
        println!("{}", serde_json::json!({"config": read.as_ref().ok(), "refusal": read.as_ref().err()}));
    }
    true
}
