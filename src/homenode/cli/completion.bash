_homenode_completion() {
    local IFS=$'\n'
    COMPREPLY=($(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
        _HOMENODE_COMPLETE=complete_bash "$1"))
    # Quote names with blanks, and add no blank behind a directory.
    [[ "${COMPREPLY[*]}" == *[/\ ]* ]] && compopt -o filenames
}
complete -o default -F _homenode_completion homenode
