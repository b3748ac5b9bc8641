// plotly makes style sheets of its own, which the page's policy takes only with its nonce
const nonce = document.querySelector('style').nonce;
const createElement = document.createElement;
document.createElement = function (name, ...more) {
  const made = createElement.call(this, name, ...more);
  if (String(name).toLowerCase() === 'style') made.nonce = nonce;
  return made;
};
