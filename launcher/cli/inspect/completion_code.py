"""
The completion code of zsh and fish, in the protocol of click. Its own code loses items: zsh's
an empty value, fish's what follows a comma, both ``--option=value``; and zsh's needs compinit,
which a new ``.zshrc`` does not have.
"""

from __future__ import annotations

ZSH = """\
#compdef pdrun

_pdrun_completion() {
    local -a described plain response line
    local type key descr
    (( ! $+commands[pdrun] )) && return 1

    line=("${(@)words[1,CURRENT]}")
    if [[ ${line[-1]} == --*=* ]]; then
        line=("${(@)line[1,-2]}" "${line[-1]%%=*}" "${line[-1]#*=}")
        compset -P 1 '*='
    fi
    response=("${(@f)$(env COMP_WORDS="${line[*]}" COMP_CWORD=$(( $#line - 1 )) \\
        _PDRUN_COMPLETE=zsh_complete pdrun)}")

    for type key descr in "${(@)response}"; do
        if [[ $type == dir ]]; then
            _path_files -/
        elif [[ $type == file ]]; then
            _path_files -f
        elif [[ $type == plain && $descr == _ ]]; then
            plain+=("$key")
        elif [[ $type == plain ]]; then
            described+=("$key:$descr")
        fi
    done

    (( $#described )) && _describe -V unsorted described
    (( $#plain )) && compadd -V unsorted -a plain
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _pdrun_completion "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
    compdef _pdrun_completion pdrun
fi
"""

FISH = """\
function _pdrun_completion
    set -l token (commandline -ct)
    set -l before (string match -r -- '^--[^=]*=' $token)
    set -l line (commandline -cp | string replace -r -- '(\\s--[^=\\s]*)=(\\S*)$' '$1 $2')
    set -l word (string replace -r -- '^--[^=]*=' '' $token)
    for item in (env _PDRUN_COMPLETE=fish_complete COMP_WORDS="$line" COMP_CWORD="$word" pdrun)
        set -l part (string split -m 1 "," -- $item)
        switch $part[1]
            case dir
                printf "$before%s\\n" (__fish_complete_directories $part[2])
            case file
                printf "$before%s\\n" (__fish_complete_path $part[2])
            case plain
                echo "$before$part[2]"
        end
    end
end

complete --no-files --command pdrun --arguments "(_pdrun_completion)"
"""
