//! Reads the parameters of a service from a connection service file, in the format of libpq's pg_service.conf. No I/O.

use super::conninfo::Params;

/// The parameters of the section `[service]`, or `None` if the file has no such section. An error names the line.
pub fn section(text: &str, service: &str) -> Result<Option<Params>, String> {
    let mut found: Option<Params> = None;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            if found.is_some() {
                break; // the first section with this name wins
            }
            if name.strip_suffix(']') == Some(service) {
                found = Some(Params::default());
            }
            continue;
        }
        let Some(params) = &mut found else { continue };
        let at = |problem: &str| format!("line {}: {problem}", index + 1);
        if line.starts_with("ldap:") || line.starts_with("ldaps:") {
            return Err(at("LDAP lookups are not supported"));
        }
        let (keyword, value) = line.split_once('=').ok_or_else(|| at("missing \"=\""))?;
        if keyword == "service" {
            return Err(at("a service cannot name another service"));
        }
        // The first line of a keyword wins.
        if !params.has(keyword) && !params.set(keyword, value) {
            return Err(at(&format!("unknown connection parameter {keyword:?}")));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# services\n\n[other]\nhost=no\nnonsense\n[shop]\n  host=db.example  \n# port\nport=5433\nport=1\npassword=a=b \n\n[last]\nhost=no\n[shop]\nuser=no\n";

    #[test]
    fn a_section_is_found_by_its_name_and_ends_at_the_next() {
        let params = section(FILE, "shop").expect("no error").expect("the section");
        assert_eq!(params.get("host"), Some("db.example"));
        assert_eq!(params.get("port"), Some("5433"));
        assert_eq!(params.get("password"), Some("a=b"));
        assert_eq!(params.get("user"), None);
        assert_eq!(section(FILE, "shoe").expect("no error"), None);
    }

    #[test]
    fn an_error_names_its_line() {
        assert_eq!(section(FILE, "other").expect_err("nonsense"), "line 5: missing \"=\"");
        let error = section("[a]\nhots=b", "a").expect_err("a typo");
        assert_eq!(error, "line 2: unknown connection parameter \"hots\"");
        assert!(section("[a]\nservice=b", "a").is_err());
        assert!(section("[a]\nldap://h/x?y?one?z", "a").is_err());
    }
}
