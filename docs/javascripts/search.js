// Removes hyphens before words of a search: in the search's own syntax "-word" excludes pages with
// that word, so a pasted message such as "--batch is 3: use a multiple of 2" would find nothing.
document.addEventListener(
  "input",
  (event) => {
    const field = event.target;
    if (!field.matches("[data-md-component=search-query]")) return;
    const words = field.value.replace(/(^|\s)-+(?=[^\s-])/g, "$1");
    if (words !== field.value) field.value = words;
  },
  true, // before the search reads the field
);
